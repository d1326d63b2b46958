"""Links over TCP and unix sockets: listening, dialling, handshakes, reading and writing frames."""
