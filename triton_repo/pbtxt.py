"""`ModelConfig` to the text of a `config.pbtxt` and back, through Triton's own protobuf schema."""

from __future__ import annotations

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as schema

from triton_repo.config import (
    DataType,
    EnsembleStep,
    InstanceGroup,
    Kind,
    ModelConfig,
    QueuePolicy,
    Resource,
    Tensor,
)
from triton_repo.names import NORMAL

ANY_VERSION = -1


def render(config: ModelConfig) -> str:
    """The text of `config.pbtxt`. Every request is one unit of work, so `max_batch_size` is 0."""
    message = schema.ModelConfig(name=config.name, max_batch_size=0)
    for tensor in config.inputs:
        message.input.add(
            name=tensor.name, data_type=tensor.data_type.value, dims=tensor.dims, optional=tensor.optional
        )
    for tensor in config.outputs:
        message.output.add(name=tensor.name, data_type=tensor.data_type.value, dims=tensor.dims)
    for key, value in config.parameters.items():
        message.parameters[key].string_value = value
    if config.decoupled:
        message.model_transaction_policy.decoupled = True
    _write_scheduling(config, message)
    return text_format.MessageToString(message, as_utf8=True)


def _write_scheduling(config: ModelConfig, message: schema.ModelConfig) -> None:
    if config.steps:
        message.platform = "ensemble"
        for step in config.steps:
            message.ensemble_scheduling.step.add(
                model_name=step.model, model_version=ANY_VERSION, input_map=step.inputs, output_map=step.outputs
            )
        return
    message.backend = "python"
    if config.queue is not None:
        message.dynamic_batching.priority_levels = NORMAL
        message.dynamic_batching.default_priority_level = NORMAL
        policy = message.dynamic_batching.default_queue_policy
        policy.max_queue_size = config.queue.max_queue_size
        policy.default_timeout_microseconds = config.queue.timeout
        # A caller's own `timeout` may shorten its wait; a request that waited longer is refused, not delayed.
        policy.allow_timeout_override = True
    if config.instance_group is not None:
        group = message.instance_group.add(count=config.instance_group.count, kind=config.instance_group.kind.value)
        group.rate_limiter.priority = config.instance_group.weight
        for resource in config.instance_group.resources:
            entry = group.rate_limiter.resources.add(name=resource.name, count=resource.count)
            setattr(entry, "global", resource.shared)


def parse(text: str) -> ModelConfig:
    """The configuration that `text` holds. Raises ValueError for text that is no model configuration."""
    try:
        message = text_format.Parse(text, schema.ModelConfig())
    except text_format.ParseError as error:
        raise ValueError(f"config.pbtxt: {error}") from error
    queue = message.dynamic_batching.default_queue_policy if message.HasField("dynamic_batching") else None
    return ModelConfig(
        name=message.name,
        inputs=tuple(_tensor(entry) for entry in message.input),
        outputs=tuple(_tensor(entry) for entry in message.output),
        instance_group=_instance_group(message.instance_group[0]) if message.instance_group else None,
        queue=QueuePolicy(queue.max_queue_size, queue.default_timeout_microseconds) if queue is not None else None,
        decoupled=message.model_transaction_policy.decoupled,
        parameters={key: value.string_value for key, value in message.parameters.items()},
        steps=tuple(
            EnsembleStep(step.model_name, dict(step.input_map), dict(step.output_map))
            for step in message.ensemble_scheduling.step
        ),
    )


def _tensor(entry: schema.ModelInput | schema.ModelOutput) -> Tensor:
    # Outputs have no such field.
    optional = isinstance(entry, schema.ModelInput) and entry.optional
    return Tensor(entry.name, DataType(schema.DataType.Name(entry.data_type)), tuple(entry.dims), optional)


def _instance_group(group: schema.ModelInstanceGroup) -> InstanceGroup:
    resources = tuple(
        Resource(resource.name, resource.count, getattr(resource, "global"))
        for resource in group.rate_limiter.resources
    )
    kind = Kind(schema.ModelInstanceGroup.Kind.Name(group.kind))
    return InstanceGroup(group.count, kind, resources, group.rate_limiter.priority)
