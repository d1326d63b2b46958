"""Links over TCP and unix sockets, and how they are opened."""
