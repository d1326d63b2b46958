"""Implementation of `aiocoll top`: each process reports its groups over a unix socket in the job's folder."""
