"""Compressed gradients between ranks, and the part of the state that holds what was not sent."""

from ftrain.parallel.compression.method import Compression as Compression
from ftrain.parallel.compression.method import Exchange as Exchange
from ftrain.parallel.compression.power_sgd import powersgd as powersgd
from ftrain.parallel.compression.sign import sign as sign
