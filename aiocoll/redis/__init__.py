"""`RedisStore`: ranks meet on a Redis server. Loaded by the first use of the name, or of a ``redis://`` URL.

connection    the server: its address, TLS, errors, one connection
client        the requests of one process, and the changes that the server publishes
store         the store, and how the URL opens it
"""
