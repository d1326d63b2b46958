"""Control plane: small messages between the ranks of a job, separate from the data links."""
