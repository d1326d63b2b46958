"""`RedisStore`: a store on a Redis server, imported at the first use of the name or of a ``redis://`` URL.

connection    address, TLS and errors of the server; one connection
client        requests of one process, and notifications of changes
store         the store, and the opener of its URLs
"""
