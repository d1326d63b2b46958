"""Dispatch of checked calls to operations: dispatcher, plans, device backends, and interceptors."""
