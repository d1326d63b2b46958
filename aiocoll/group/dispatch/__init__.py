"""From a checked call to its operation: dispatcher, plans, devices, and interceptors."""
