from multiprocessing import get_context  # noqa: F401
