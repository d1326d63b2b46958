"""Another user, who asks: ``python asking.py SOCKET``; prints what comes of it."""

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
    print("answered" if connection.recv(1) else "hung up")
except PermissionError:
    print("not let in")
except ConnectionError:
    print("hung up")
