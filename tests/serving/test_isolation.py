"""What clients of a running server can and cannot do to it and to each other; toy models stand for the real ones."""

from __future__ import annotations

import itertools
import json
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
import pytest
from google.protobuf import text_format
from tritonclient.grpc import InferenceServerClient, InferInput, service_pb2
from tritonclient.utils import InferenceServerException

from tests.serving.conftest import Toy
from tests.serving.toy_repository import toy_configs
from triton_repo import pbtxt
from triton_repo.client import Client, ClientError, Failure
from triton_repo.server import TritonServer

PAUSE = 0.1


@pytest.fixture
def client(toy_server: TritonServer) -> Iterator[Client]:
    with Client(toy_server.endpoints.grpc) as one:
        yield one


@pytest.fixture
def raw(toy_server: TritonServer) -> Iterator[InferenceServerClient]:
    with InferenceServerClient(toy_server.endpoints.grpc) as one:
        yield one


def test_it_listens_on_loopback_only(toy_server: TritonServer) -> None:
    deadline = time.monotonic() + 20
    listening = _listening(toy_server)
    # Triton opens the port of its metrics last, and is ready before.
    while len({address.port for address in listening}) < 3 and time.monotonic() < deadline:
        time.sleep(PAUSE)
        listening = _listening(toy_server)
    assert {address.ip.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}
    assert len({address.port for address in listening}) == 3


def _listening(server: TritonServer) -> list[Any]:
    connections = psutil.Process(server.pid).net_connections()
    return [connection.laddr for connection in connections if connection.status == psutil.CONN_LISTEN]


def test_triton_reads_the_configuration_as_it_was_meant(raw: InferenceServerClient, shared_toy: Toy) -> None:
    for config, _ in toy_configs(shared_toy.store, shared_toy.state):
        read = pbtxt.parse(text_format.MessageToString(raw.get_model_config(config.name).config))
        assert (read.inputs, read.outputs, read.queue, read.decoupled) == (
            config.inputs,
            config.outputs,
            config.queue,
            config.decoupled,
        )
        assert (dict(read.parameters), read.steps) == (dict(config.parameters), config.steps)
        assert config.instance_group is None or read.instance_group == config.instance_group


@pytest.mark.parametrize(
    "call",
    [
        lambda raw: raw.load_model("h3_stream"),
        lambda raw: raw.unload_model("h3_stream"),
        lambda raw: raw.register_system_shared_memory("a", "/b", 1),
        lambda raw: raw.update_trace_settings(settings={"trace_level": ["OFF"]}),
        lambda raw: raw.update_log_settings({"log_info": False}),
    ],
    ids=["load", "unload", "shared memory", "trace", "log"],
)
def test_clients_cannot_manage_the_server(raw: InferenceServerClient, call: Callable[[Any], object]) -> None:
    with pytest.raises(InferenceServerException, match="restricted"):
        call(raw)


def test_a_refused_request_is_told_with_its_own_text(client: Client) -> None:
    with pytest.raises(ClientError) as caught:
        client.generate("p", {"refuse": 7})
    assert (caught.value.failure, str(caught.value)) == (Failure.INVALID, "refuse: got 7; must not be given")
    with pytest.raises(ClientError) as caught:
        client.generate_unary("p", {"refuse": 7})
    assert caught.value.failure is Failure.INVALID
    assert str(caught.value).endswith("refuse: got 7; must not be given")


def test_a_crash_is_told_in_one_line_and_logged_in_full(client: Client, shared_toy: Toy) -> None:
    with pytest.raises(ClientError) as caught:
        client.generate_unary("p", {"crash": True})
    text = str(caught.value)
    assert caught.value.failure is Failure.INTERNAL
    assert "KeyError" in text
    assert "/secret" not in text
    assert "\n" not in text
    incident = re.search(r"under (\w+)$", text)
    assert incident is not None
    log = shared_toy.log_file.read_text()
    (told,) = [line for line in map(json.loads, _json_lines(log)) if line.get("incident") == incident[1]]
    assert (told["source"], told["level"]) == ("first", "error")
    assert "KeyError: '/secret/path'" in told["traceback"]
    assert client.generate_unary("p", {}).mp4 == b'{"outputs": 1}'


def _json_lines(log: str) -> list[str]:
    """Those of the models among Triton's own."""
    return [line for line in log.splitlines() if line.startswith("{")]


def test_an_mp4_of_64_mb_arrives(client: Client) -> None:
    assert len(client.generate("p", {"size": 64_000_000}).mp4) == 64_000_000


def test_progress_arrives_while_the_request_runs(client: Client) -> None:
    times: list[float] = []
    client.generate("p", {"units": 5, "pause": PAUSE}, lambda event: times.append(time.monotonic()))
    assert len(times) == 5
    assert times[-1] - times[0] > 3 * PAUSE


def test_a_full_queue_refuses_at_once(toy_server: TritonServer) -> None:
    outcomes: list[object] = []

    def ask() -> None:
        started = time.monotonic()
        try:
            with Client(toy_server.endpoints.grpc) as one:
                outcomes.append(one.generate("p", {"units": 5, "pause": PAUSE}).mp4)
        except ClientError as error:
            outcomes.append((error.failure, str(error), time.monotonic() - started))

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
        time.sleep(0.03)
    for thread in threads:
        thread.join()
    refused = [outcome for outcome in outcomes if isinstance(outcome, tuple)]
    assert outcomes.count(b"m") == 3  # one runs and two wait
    assert len(refused) == 3
    for failure, text, seconds in refused:
        assert failure is Failure.UNAVAILABLE
        assert "Exceeds maximum queue size" in text
        assert seconds < 3 * PAUSE


def test_models_take_turns_on_the_device(toy_server: TritonServer, shared_toy: Toy) -> None:
    before = len(shared_toy.spans()) if (shared_toy.store / "spans").exists() else 0

    def ask(unary: bool) -> None:
        with Client(toy_server.endpoints.grpc) as one:
            (one.generate_unary if unary else one.generate)("p", {"units": 3, "pause": PAUSE})

    threads = [threading.Thread(target=ask, args=(index % 2 == 0,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spans = sorted(shared_toy.spans()[before:])
    assert len(spans) == 6  # two stages of each ensemble request, and the streams
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def _assert_free_within_a_unit(client: Client) -> None:
    """The next request starts as soon as the unit that was running has ended."""
    started = time.monotonic()
    client.generate("p", {"units": 1, "pause": PAUSE})
    # One unit that was running, one of this request, and room for a busy machine; the cancelled one had minutes left.
    assert time.monotonic() - started < 2 * PAUSE + 3


def test_an_interrupted_client_frees_the_server(client: Client, toy_server: TritonServer) -> None:
    def interrupt(event: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        client.generate("p", {"units": 1000, "pause": PAUSE}, interrupt)
    _assert_free_within_a_unit(client)


def test_a_client_that_gives_up_frees_the_server(client: Client) -> None:
    with pytest.raises(ClientError) as caught:
        client.generate("p", {"units": 1000, "pause": PAUSE}, timeout=0.5)
    assert caught.value.failure is Failure.TIMEOUT
    _assert_free_within_a_unit(client)


def test_a_killed_client_frees_the_server(client: Client, toy_server: TritonServer) -> None:
    script = (
        "import sys; from triton_repo.client import Client\n"
        "Client(sys.argv[1]).generate('p', {'units': 1000, 'pause': 0.1}, lambda event: print(event, flush=True))"
    )
    command = [sys.executable, "-c", script, toy_server.endpoints.grpc]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert "denoise" in other.stdout.readline()
        other.send_signal(signal.SIGKILL)
    _assert_free_within_a_unit(client)


def test_no_server_is_told_with_the_command_that_starts_one() -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(ClientError, match="h3trt serve") as caught:
        client.generate("p", {})
    assert caught.value.failure is Failure.UNAVAILABLE


def _tensor(name: str, array: np.ndarray, dtype: str) -> InferInput:
    tensor = InferInput(name, array.shape, dtype)
    tensor.set_data_from_numpy(array)
    return tensor


TEXT = np.array([b"{}"], dtype=np.object_)
TWO = np.array([b"{}", b"{}"], dtype=np.object_)


@pytest.mark.parametrize("model", ["h3", "h3_stream"])
@pytest.mark.parametrize(
    ("inputs", "field"),
    [
        ([], "PROMPT"),
        ([_tensor("PROMPT", TEXT, "BYTES")], "PARAMS"),
        ([_tensor("PROMPT", TEXT, "BYTES"), _tensor("PARAMS", np.zeros(1, np.float32), "FP32")], "PARAMS"),
        ([_tensor("PROMPT", TWO, "BYTES"), _tensor("PARAMS", TEXT, "BYTES")], "PROMPT"),
        ([_tensor(name, TEXT, "BYTES") for name in ("PROMPT", "PARAMS", "EXTRA")], "EXTRA"),
    ],
    ids=["no input", "one missing", "wrong type", "two elements", "one too many"],
)
def test_malformed_tensors_are_refused_by_name(
    client: Client, raw: InferenceServerClient, model: str, inputs: list[InferInput], field: str
) -> None:
    assert field in str(_refusal(raw, model, inputs).message())
    assert client.generate("p", {}).mp4 == b"m"


def _refusal(raw: InferenceServerClient, model: str, inputs: list[InferInput]) -> InferenceServerException:
    if model == "h3":
        with pytest.raises(InferenceServerException) as caught:
            raw.infer(model, inputs)
        assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
        return caught.value
    answers: queue.SimpleQueue[InferenceServerException] = queue.SimpleQueue()
    raw.start_stream(lambda result, error: answers.put(error))
    raw.async_stream_infer(model, inputs)
    error = answers.get(timeout=10)
    raw.stop_stream()
    return error


@pytest.mark.parametrize("content", [b"", b"\x05\x00\x00\x00ab", b"\xff\xff\xff\xff{}", b"\x02\x00\x00\x00{}{}"])
def test_torn_bytes_tensors_are_refused(toy_server: TritonServer, client: Client, content: bytes) -> None:
    """The length before the text is wrong, which no client library would send."""
    import grpc
    from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

    request = service_pb2.ModelInferRequest(model_name="h3")
    for name in ("PROMPT", "PARAMS"):
        request.inputs.add(name=name, datatype="BYTES", shape=[1])
        request.raw_input_contents.append(content)
    with grpc.insecure_channel(toy_server.endpoints.grpc) as channel, pytest.raises(grpc.RpcError) as caught:
        GRPCInferenceServiceStub(channel).ModelInfer(request)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert client.generate_unary("p", {}).mp4 == b'{"outputs": 1}'
