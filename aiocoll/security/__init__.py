"""Authentication of a job's peers: the job key, the handshake, and connections that have not proven the key."""
