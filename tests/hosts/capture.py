"""A program that writes all packets of a network interface to its standard output. Argument: the interface."""

from __future__ import annotations

import select
import socket
import sys

ETH_P_ALL = 3

with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL)) as capturing:
    capturing.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 20)
    capturing.bind((sys.argv[1], 0))
    print("capturing", file=sys.stderr, flush=True)
    while True:
        ready, _, _ = select.select([capturing, sys.stdin], [], [])
        if capturing in ready:
            sys.stdout.buffer.write(capturing.recv(1 << 17))
        elif sys.stdin in ready:
            break
