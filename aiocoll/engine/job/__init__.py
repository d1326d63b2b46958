"""What every part of an endpoint needs to know of this rank and its job."""
