"""A backend for `compiled` that records the graphs that it is called with, and runs them as they are."""

from torch._dynamo import register_backend

compiled_graphs = []


@register_backend
def ftrain_counting(graph, inputs):
    compiled_graphs.append(graph)
    return graph.forward
