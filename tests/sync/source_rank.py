"""A source rank in a process of its own: says where it is, and serves until its standard input ends.

Arguments: fabric, rank, engine...
"""

import sys

import msgspec
from peers import model
from test_p2p_sharded import TENSOR

from fathom.config.families import FabricKind
from fathom.sync.digest import build_manifest
from fathom.sync.transports.p2p.fabrics import FABRICS
from fathom.sync.transports.p2p.held import Slice
from fathom.sync.transports.p2p.sender import Sender

fabric, rank, *engines = sys.argv[1:]
manifest = build_manifest(0, 1, None, model())
sender = Sender(FABRICS[FabricKind(fabric)]("127.0.0.1"), "127.0.0.1", 0, 20.0)
held = TENSOR[int(rank)]
sender.hold(manifest, {name: Slice(box=box, tensor=model()[name][box.slices]) for name, box in held.items()})
print(msgspec.json.encode(sender.offer(manifest.version, engines, whole=False)).decode(), flush=True)
sys.stdin.read()
sender.close()
