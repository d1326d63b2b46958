"""Service behind `aiocoll top`: each process reports its groups over a unix socket in the folder of its job."""
