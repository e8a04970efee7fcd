"""The same bytes without a protocol around them: one flat buffer through each library, as the transports are judged."""
