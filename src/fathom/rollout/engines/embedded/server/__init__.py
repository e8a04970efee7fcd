"""The engine's process: HTTP in one thread, the decode loop in the main one.

client ==HTTP==> app (asyncio thread) --calls at a token boundary--> scheduler (main thread) --> decoder --> model
       <=frames=                      <--chunks, coalesced---------
"""
