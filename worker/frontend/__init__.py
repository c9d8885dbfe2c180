"""Frontend of a worker: connects gateways to the engine, on the worker's event loop. Does not
import torch."""
