from .kernels import squared_size as squared_norm
__all__=['squared_norm']
