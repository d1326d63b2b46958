"""The control plane: small messages between the ranks of a job, beside the data."""
