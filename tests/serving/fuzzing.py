"""Random requests to the gRPC entry: wrong in tensors, text, parameters, protocol or manners; a seed repeats them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from typing import Any

import grpc
from tritonclient.grpc import service_pb2
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

Request = service_pb2.ModelInferRequest

QUICK = {"width": 256, "height": 256, "aspect_ratio": "1:1", "duration": 4, "num_inference_steps": 1, "seed": 5}
INPUTS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "h3": (("PROMPT", "BYTES"), ("PARAMS", "BYTES")),
    "h3_stream": (("PROMPT", "BYTES"), ("PARAMS", "BYTES")),
    "h3_prepare": (("PROMPT", "BYTES"), ("PARAMS", "BYTES")),
    "h3_encode": (("RESOLVED", "BYTES"), ("TOKENS", "INT64"), ("TAGS", "INT64"), ("MEDIA", "BYTES")),
    "h3_denoise": (("RESOLVED", "BYTES"), ("TEXT", "FP32"), ("TAGS", "INT64"), ("CONDITION_VIDEO", "FP32")),
    "h3_decode": (("RESOLVED", "BYTES"), ("VIDEO", "FP32"), ("AUDIO", "FP32")),
}
NAMES = ("PROMPT", "PARAMS", "IMAGES", "VIDEOS", "AUDIOS", "MEDIA", "", "prompt", "P\0", "N" * 5000, "../x")
MODELS = ("", "h3/", "../h3", "h3\0", "H3", "m" * 70_000, "h3_prepare/1")
TYPES = ("BYTES", "FP32", "INT64", "UINT8", "BOOL", "FP16", "BF16", "", "bytes", "FP128")
SIZES = (0, 1, 2, -1, -(2**63), 2**31, 2**32 + 1, 2**62, 2**63 - 1)
NUMBERS = (0, -1, 1, 24, 10**9, 10**400, -(2**63), 2**64, 0.1, 1e308, 1e-320)
PATIENCE = 20.0
"""Seconds after which a call is given up; what it left running ends by itself, or with its stream."""


class Fuzz:
    """Sends one random thing at a time. Errors are what it is after; a server that is gone is UNAVAILABLE for ever.

    Two things are left out that end Triton 2.51, whatever it serves: the header `triton_grpc_error` on a stream that
    is cancelled, and models of both kinds, decoupled and not, on one stream; and sizes that are legal and take long.
    With `drops`, streams are left before their end too; Triton 2.51 keeps the memory of those that had ended for it.
    """

    def __init__(self, url: str, seed: int, drops: bool) -> None:
        self._random = random.Random(seed)
        self._url = url
        self._channel = grpc.insecure_channel(url, options=[("grpc.max_receive_message_length", -1)])
        self._stub = GRPCInferenceServiceStub(self._channel)
        self._ways: tuple[Callable[[], None], ...] = (
            self._unary,
            self._unary,
            self._stream,
            self._broken_message,
            self._other_call,
            *((self._dropped_stream, self._dropped_connection) if drops else ()),
        )

    def close(self) -> None:
        """Ends the connection."""
        self._channel.close()

    def step(self) -> None:
        """Does one thing. Whatever the server says is fine as long as it says it."""
        try:
            self._pick(self._ways)()
        except (grpc.RpcError, ValueError, OverflowError):
            # ValueError: what protobuf refuses to write down; gRPC's errors are the server's answers.
            return

    def _pick(self, choices: Any) -> Any:
        return self._random.choice(choices)

    def _chance(self, probability: float) -> bool:
        return self._random.random() < probability

    def _unary(self) -> None:
        self._stub.ModelInfer(self.request(self._pick(tuple(INPUTS))), timeout=PATIENCE)

    def _stream(self) -> None:
        """Some requests on one stream, all of whose answers are read."""
        for _ in self._requested():
            pass

    def _dropped_stream(self) -> None:
        """The same, given up after the first few answers."""
        call = self._requested()
        for _, _ in zip(range(self._pick((0, 1, 2))), call, strict=False):
            pass
        call.cancel()

    def _requested(self) -> Any:
        model = self._pick(("h3_stream", "h3_stream", "h3_prepare"))
        requests = [self.request(model) for _ in range(self._pick((1, 1, 2, 5)))]
        if len(requests) > 1:
            for request in requests:
                request.model_name, request.model_version = model, ""
        return self._stub.ModelStreamInfer(iter(requests), timeout=PATIENCE)

    def _dropped_connection(self) -> None:
        """A connection that goes as soon as a request is under way."""
        with grpc.insecure_channel(self._url) as channel:
            stub = GRPCInferenceServiceStub(channel)
            call = stub.ModelStreamInfer(iter([self.request("h3_stream")]), timeout=PATIENCE)
            if self._chance(0.5):
                next(call, None)

    def _broken_message(self) -> None:
        """Bytes that are no message, or that were one."""
        method = self._pick(("ModelInfer", "ModelMetadata", "ModelStatistics", "RepositoryIndex", "ServerLive"))
        data = self._noise(self._pick((0, 1, 30, 3000))) if self._chance(0.3) else self._flipped()
        call = self._channel.unary_unary(f"/inference.GRPCInferenceService/{method}")
        call(data, timeout=PATIENCE)

    def _flipped(self) -> bytes:
        data = bytearray(self.request("h3_prepare").SerializeToString())
        for _ in range(self._pick((1, 3, 20))):
            data[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)
        return bytes(data[: self._random.randrange(len(data) + 1)] if self._chance(0.3) else data)

    def _other_call(self) -> None:
        name = self._pick((*MODELS, *INPUTS))
        pb = service_pb2
        method, message = self._pick(
            (
                ("ModelReady", pb.ModelReadyRequest(name=name, version=self._pick(("", "1", "x", "-1", "9" * 30)))),
                ("ModelMetadata", pb.ModelMetadataRequest(name=name)),
                ("ModelConfig", pb.ModelConfigRequest(name=name)),
                ("ModelStatistics", pb.ModelStatisticsRequest(name=name)),
                ("RepositoryIndex", pb.RepositoryIndexRequest(repository_name=name)),
                ("RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name=name)),
                ("RepositoryModelUnload", pb.RepositoryModelUnloadRequest(model_name=name)),
                (
                    "SystemSharedMemoryRegister",
                    pb.SystemSharedMemoryRegisterRequest(name="a", key="/" + name, byte_size=8),
                ),
                ("SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest(name=name)),
                (
                    "CudaSharedMemoryRegister",
                    pb.CudaSharedMemoryRegisterRequest(name="a", raw_handle=b"h", byte_size=8),
                ),
                ("TraceSetting", pb.TraceSettingRequest(model_name=name)),
                ("LogSettings", pb.LogSettingsRequest()),
            )
        )
        getattr(self._stub, method)(message, timeout=PATIENCE)

    def request(self, model: str) -> Request:
        """A request for `model`, spoilt in some ways; few of those for models that run engines are left legal."""
        request = Request(model_name=model, id=self._pick(("", "a", "i" * 100_000)))
        for name, datatype in INPUTS[model]:
            self._add(request, name, datatype, self._content(model, name, datatype))
        for _ in range(self._pick((1, 1, 2, 4))):
            self._pick(self._spoilers)(self, request)
        return request

    def _content(self, model: str, name: str, datatype: str) -> bytes:
        if datatype != "BYTES":
            return self._noise(8)
        if name == "PROMPT":
            text = self._pick(
                (b"A fox.", b"", b"\xff\xfe", "\ud800".encode("utf-8", "surrogatepass"), b"\0", b"p" * 8000)
            )
        elif name == "PARAMS":
            text = self._params(model).encode("utf-8", "surrogatepass")
        else:
            text = self._pick((b"{}", b"[]", b"", self._noise(50), b'{"task": "t2va"}', b"[" * 100_000))
        return len(text).to_bytes(4, "little") + text

    def _params(self, model: str) -> str:
        """An object with wrong values, or no object; sizes stay small where a model would go and run it."""
        if self._chance(0.25):
            return self._pick(
                (
                    "",
                    "[]",
                    "null",
                    "{",
                    "[" * 100_000,
                    '{"a":' * 50_000,
                    "NaN",
                    '{"seed": NaN}',
                    '{"seed": 1e999}',
                    "\ud800",
                )
            )
        params: dict[str, Any] = dict(QUICK)
        free = (
            "task",
            "seed",
            "fps",
            "flow_shift",
            "target",
            "image_reference",
            "references",
            "frame_indices",
            "x",
            "",
        )
        sizes = ("width", "height", "duration", "num_inference_steps", "num_outputs_per_prompt", "aspect_ratio")
        for name in self._random.sample((*free, *sizes) if model == "h3_prepare" else free, self._pick((1, 2, 5))):
            params[name] = self._value(3)
        if model != "h3_prepare" and self._chance(0.9):
            params["nonsense"] = 0
        return json.dumps(params)

    def _value(self, depth: int) -> Any:
        kinds: list[Callable[[], Any]] = [
            lambda: self._pick(NUMBERS),
            lambda: float(self._pick(("nan", "inf", "-inf"))),
            lambda: self._pick(
                (None, True, False, "", "x" * 10_000, "\0", "\ud800", "file:///etc/passwd", "http://[::1]/a")
            ),
        ]
        if depth:
            kinds.append(lambda: [self._value(depth - 1) for _ in range(self._pick((0, 1, 30)))])
            kinds.append(lambda: {self._pick(("a", "", "\0", "image_url")): self._value(depth - 1) for _ in range(3)})
        return self._pick(kinds)()

    def _add(self, request: Request, name: str, datatype: str, content: bytes) -> None:
        shape = [1] if datatype in ("BYTES", "INT64") else [1, 1]
        request.inputs.add(name=name, datatype=datatype, shape=shape)
        request.raw_input_contents.append(content)

    def _noise(self, size: int) -> bytes:
        return self._random.randbytes(size)

    def _spoil_type(self, request: Request) -> None:
        self._one_input(request).datatype = self._pick(TYPES)

    def _spoil_shape(self, request: Request) -> None:
        self._one_input(request).shape[:] = [self._pick(SIZES) for _ in range(self._pick((0, 1, 2, 5, 1000)))]

    def _spoil_name(self, request: Request) -> None:
        self._one_input(request).name = self._pick(NAMES)

    def _spoil_count(self, request: Request) -> None:
        """One input too many or too few, or one file of nonsense more."""
        if self._chance(0.5):
            del request.inputs[self._random.randrange(len(request.inputs) + 1) :]
        else:
            content = self._noise(self._pick((4, 100, 1 << 20)))
            self._add(request, self._pick(NAMES), "BYTES", len(content).to_bytes(4, "little") + content)

    def _spoil_raw(self, request: Request) -> None:
        """Contents too many, too few, cut, or with a length that is not theirs."""
        contents = list(request.raw_input_contents) or [b""]
        place = self._random.randrange(len(contents))
        contents[place] = self._pick(
            (
                b"",
                contents[place][:3],
                contents[place][:-1],
                contents[place] * 2,
                b"\xff\xff\xff\xff" + contents[place],
                b"\x00\x00\x00\x80" + contents[place],
                self._noise(self._pick((1, 8, 1 << 16))),
            )
        )
        del request.raw_input_contents[:]
        request.raw_input_contents.extend(
            contents[: self._pick((len(contents), 0, 1))] + [b"x"] * self._pick((0, 0, 1, 50))
        )

    def _spoil_contents(self, request: Request) -> None:
        """Typed contents beside the raw ones, or in their place."""
        contents = self._one_input(request).contents
        contents.bytes_contents.extend([self._noise(9)] * self._pick((1, 2, 1000)))
        contents.int64_contents.extend([2**62] * self._pick((0, 1, 1000)))
        contents.fp32_contents.extend([float("nan")] * self._pick((0, 1)))
        if self._chance(0.5):
            del request.raw_input_contents[:]

    def _spoil_parameters(self, request: Request) -> None:
        names = (
            "priority",
            "timeout",
            "sequence_id",
            "sequence_start",
            "sequence_end",
            "binary_data_output",
            "x" * 1000,
        )
        for holder in (request, self._one_input(request)):
            parameter = holder.parameters[self._pick((*names, "shared_memory_region", "shared_memory_byte_size"))]
            kind = self._pick(("int64", "string", "bool", "uint64", "double"))
            value = {"string": self._pick(("", "a", "9" * 30)), "bool": True, "double": float("nan")}
            numbers = {"int64": (-(2**63), -1, 0, 1, 2**63 - 1), "uint64": (0, 1, 2**64 - 1)}
            setattr(parameter, f"{kind}_param", value[kind] if kind in value else self._pick(numbers[kind]))

    def _spoil_outputs(self, request: Request) -> None:
        for _ in range(self._pick((1, 2, 300))):
            output = request.outputs.add(name=self._pick(("RESOLVED", "MP4", "EVENT", "", "X" * 999)))
            output.parameters["classification"].int64_param = self._pick((-1, 0, 1, 2**62))

    def _spoil_address(self, request: Request) -> None:
        if self._chance(0.5):
            request.model_version = self._pick(("1", "2", "-1", "x", "9" * 30, " 1"))
        else:
            request.model_name = self._pick(MODELS)

    def _one_input(self, request: Request) -> Any:
        if not request.inputs:
            request.inputs.add(name="PROMPT", datatype="BYTES", shape=[1])
        return self._pick(request.inputs)

    _spoilers = (
        _spoil_type,
        _spoil_shape,
        _spoil_name,
        _spoil_count,
        _spoil_raw,
        _spoil_contents,
        _spoil_parameters,
        _spoil_outputs,
        _spoil_address,
    )
