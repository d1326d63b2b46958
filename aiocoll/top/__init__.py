"""Service behind `aiocoll top`: processes report their groups over unix sockets in one folder per job."""
