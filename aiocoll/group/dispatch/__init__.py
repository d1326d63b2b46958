"""The path from a checked call to an operation: dispatcher, plans, devices, and interceptors."""
