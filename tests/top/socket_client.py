"""A program that becomes another user, sends a request to the given unix socket, and prints the outcome."""

import os
import socket
import sys

os.setgid(65534)
os.setuid(65534)
connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
connection.settimeout(20)
try:
    connection.connect(sys.argv[1])
    connection.send(b"?")
    print("answered" if connection.recv(1) else "closed")
except PermissionError:
    print("denied")
except ConnectionError:
    print("closed")
