"""What clients that stall, vanish or die do to the server and to the others: nothing that lasts."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterator

import grpc
from tritonclient.grpc import service_pb2
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from tests.faults.conftest import OtherClient, own_memory
from tests.serving.conftest import Toy, Traces
from tests.serving.test_life_cycle import Background
from triton_repo.client import Client
from triton_repo.server import TritonServer

FOREVER = {"units": 10_000, "pause": 0.1}
CLIP = 16_000_000
READERS = 3
POOL = 8
"""Triton's default of --grpc-infer-allocation-pool-size."""
CHUNKS = 600_000


def test_a_client_that_vanishes_without_a_word_loses_its_request(toy_server: TritonServer, client: Client) -> None:
    """A stopped process answers nothing and closes nothing, like a machine whose network has gone."""
    with OtherClient(toy_server, **FOREVER) as other:
        assert other.line() == "event"
        other.process.send_signal(signal.SIGSTOP)
        # The device is free again, which it would not be for a quarter of an hour.
        assert client.generate("p", {}, timeout=60).mp4 == b"m"


def test_the_request_of_a_client_killed_in_the_queue_is_not_begun(
    toy_server: TritonServer, shared_toy: Toy, client: Client
) -> None:
    running = Background(lambda: Client(toy_server.endpoints.grpc).generate("p", {"units": 20, "pause": 0.1}).mp4)
    time.sleep(0.3)
    with OtherClient(toy_server, units=1, pause=5) as waiting:
        time.sleep(1)
        waiting.process.kill()
    assert running.join() == b"m"
    assert client.generate("p", {"units": 1, "pause": 0.1}).mp4 == b"m"
    assert all(end - start < 4 for start, end in shared_toy.spans())


class SlowReader:
    """A client that asks for a clip and takes messages only when told to."""

    def __init__(self, server: TritonServer) -> None:
        self._channel = grpc.insecure_channel(server.endpoints.grpc, options=[("grpc.max_receive_message_length", -1)])
        self.messages = GRPCInferenceServiceStub(self._channel).ModelStreamInfer(self._requests())

    def _requests(self) -> Iterator[service_pb2.ModelInferRequest]:
        request = service_pb2.ModelInferRequest(model_name="h3_stream")
        for name, text in (("PROMPT", b"p"), ("PARAMS", b'{"size": %d}' % CLIP)):
            request.inputs.add(name=name, datatype="BYTES", shape=[1])
            request.raw_input_contents.append(len(text).to_bytes(4, "little") + text)
        yield request

    def clip(self) -> bytes:
        """Everything that was sent, read to the end."""
        contents = [one for message in self.messages for one in message.infer_response.raw_output_contents]
        self._channel.close()
        return contents[-1][4:]


def test_slow_readers_hold_neither_the_device_nor_memory(toy_server: TritonServer, client: Client) -> None:
    before = own_memory(toy_server)
    for _ in range(5):
        assert _let_slow_readers_in(toy_server, client) == [b"m" * CLIP] * READERS
    # Triton keeps a few states of requests for the next ones, and in each the last clip.
    assert own_memory(toy_server) < before + (POOL + 1) * CLIP


def _let_slow_readers_in(server: TritonServer, client: Client) -> list[bytes]:
    """Their clips, which they take when another client has had its own after each of them."""
    readers = []
    for _ in range(READERS):
        readers.append(SlowReader(server))
        assert client.generate("p", {}, timeout=60).mp4 == b"m"
    return [reader.clip() for reader in readers]


def test_killed_clients_leave_no_memory(toy_server: TritonServer, client: Client) -> None:
    """Before they ask, while they are answered for the first time, at work."""

    def kill(moment: float) -> None:
        with OtherClient(toy_server, units=1000, pause=0.05):
            time.sleep(moment)

    traces = Traces(toy_server.pid)
    kill(1.5)
    assert client.generate("p", {}, timeout=60).mp4 == b"m"
    before, files = own_memory(toy_server), sorted(traces.shared_memory())
    for moment in (0.9, 1.1, 1.3):
        kill(moment)
    assert client.generate("p", {}, timeout=60).mp4 == b"m"
    assert own_memory(toy_server) < before + CLIP // 4
    assert sorted(traces.shared_memory()) == files


def test_a_body_in_many_chunks_is_not_read_over_http(toy_server: TritonServer, client: Client) -> None:
    host, port = toy_server.endpoints.http.split(":")
    for path in ("/v2/models/h3/infer", "/v2/models/h3_prepare/generate", "/v2/repository/index", "/v2/logging"):
        with socket.create_connection((host, int(port))) as connection:
            head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nTransfer-Encoding: chunked\r\n\r\n"
            connection.sendall(head.encode() + b"1\r\nA\r\n" * CHUNKS + b"0\r\n\r\n")
            assert connection.recv(99).startswith(b"HTTP/1.1 403 ")
    assert client.generate("p", {}).mp4 == b"m"
