"""One measurement in one process, as `stoker bench` runs it: the worker by its place in a checkout."""

from stoker.bench.worker import main

if __name__ == "__main__":
    main()
