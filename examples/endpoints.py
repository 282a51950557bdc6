"""A server and its clients, without ranks and without a launcher.

python examples/endpoints.py serve                          # prints its address
python examples/endpoints.py ask tcp://127.0.0.1:40123      # in another shell, any number of times
"""

import sys

import numpy as np

import rankmesh as rm


def serve() -> None:
    """Answer one client after the other, until the first minute without one."""
    with rm.Endpoint("tcp://127.0.0.1:0", name="server") as endpoint:
        print(endpoint.address, flush=True)
        while True:
            try:
                client = endpoint.accept(timeout=60)
            except rm.DeadlineError:
                return
            matrix = client.recv_object(timeout=10)
            client.send_object({"mean": float(matrix.mean()), "doubled": 2 * matrix})
            print(f"answered {client}", flush=True)


def ask(address: str) -> None:
    with rm.Endpoint(None, name="client") as endpoint:  # None: it connects, and nobody connects to it
        server = endpoint.connect(address, timeout=10)
        server.send_object(np.arange(6.0).reshape(2, 3))
        answer = server.recv_object(timeout=10)
        print(f"mean {answer['mean']}, doubled {answer['doubled'].tolist()}")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["serve"]:
            serve()
        case ["ask", address]:
            ask(address)
        case _:
            sys.exit(__doc__)
