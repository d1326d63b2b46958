"""Which ranks are alive, what an operation waits for, and whose call differs."""
