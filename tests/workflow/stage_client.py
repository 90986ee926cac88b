"""The `cellmill` of tests: asks stage_server.py at the socket of the first argument to run the
others. Imports little.
"""

import json
import os
import socket
import sys

_, path, *words = sys.argv
asked = {
    "words": words,
    "folder": os.getcwd(),
    "environment": dict(os.environ),
    "umask": os.umask(0),
}
with socket.socket(socket.AF_UNIX) as server:
    server.connect(path)
    socket.send_fds(server, [b"."], [0, 1, 2])
    server.sendall(json.dumps(asked).encode() + b"\n")
    sys.exit(int(server.makefile().readline()))
