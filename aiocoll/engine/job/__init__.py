"""What every part of an endpoint knows of this rank and its job."""
