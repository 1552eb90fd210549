"""Counts, as PyTorch keeps them by part and event."""
import collections

counters = collections.defaultdict(collections.Counter)
