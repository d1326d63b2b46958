"""Failure detection: which ranks are alive, what an operation waits for, and which calls do not match."""
