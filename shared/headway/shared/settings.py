"""All settings: one class, read from the environment as `HEADWAY_<NAME>`; docs/operations.md explains each."""

import shlex
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from headway.shared.errors import ConfigurationError
from headway.shared.lanes import Lane, make_lanes


class Settings(BaseSettings):
    """Settings of the API, the worker and the client.

    Raises:
        pydantic.ValidationError: a value has the wrong type or is out of range.
        ConfigurationError: values contradict one another.
    """

    model_config = SettingsConfigDict(env_prefix="HEADWAY_", frozen=True, env_ignore_empty=True, allow_inf_nan=False)

    redis_url: str = Field(
        default="redis://127.0.0.1:6379/0", description="Redis or Valkey, as a URL (redis, rediss, unix)"
    )
    prefix: str = Field(default="hw", pattern=r"^[A-Za-z0-9_.-]+$", description="what every key begins with")

    model: str = Field(default="", description="the model: a folder or a Hugging Face id")
    served_model: str = Field(default="", description="the name that callers use; the model's own when empty")
    tokenizer: str = Field(default="", description="folder or id of the tokenizer; the model's own when empty")
    max_model_len: int | None = Field(default=None, gt=0, description="context length; the model's own when unset")

    short_below: int = Field(default=8192, description="prompts of fewer tokens go to lane short")
    mid_to: int = Field(
        default=32768, description="prompts of up to so many tokens go to lane mid, longer ones to long"
    )
    lane_shares: Annotated[tuple[float, float, float], NoDecode] = Field(
        default=(0.5, 0.3, 0.2), description="shares of slots and KV tokens of the lanes short, mid and long"
    )
    expected_output_tokens: int = Field(
        default=256, gt=0, description="KV tokens reserved for the output of a job that names no limit"
    )

    keep_record_s: float = Field(default=86400, ge=0.001, description="seconds that a job's record outlives its end")
    keep_result_s: float = Field(
        default=3600, ge=0.001, description="seconds that the result and the request body outlive it"
    )
    keep_log_s: float = Field(default=600, ge=0.001, description="seconds that the reply log outlives it")

    api_host: str = Field(default="127.0.0.1", description="address that the API listens on")
    api_port: int = Field(default=8000, ge=0, le=65535, description="port that the API listens on")
    api_grace_s: float = Field(default=25, ge=0, description="seconds that a stopping API gives to open streams")
    heartbeat_s: float = Field(
        default=10, gt=0, description="a waiting stream sends a comment after so many silent seconds"
    )
    max_body_bytes: int = Field(default=32 * 2**20, gt=0, description="longest request body")

    engine: Literal["vllm", "upstream", "simulated"] = Field(default="vllm", description="what generates the tokens")
    engine_args: str = Field(default="", description="further flags of `vllm serve`, as on a command line")
    tensor_parallel_size: int = Field(default=1, gt=0, description="GPUs, or CPU sockets, that share the model")
    batch_max_wait_ms: float = Field(
        default=0,
        ge=0,
        description="longest time from the first job read to the engine call; 0 admits what is there at once",
    )
    batch_max_jobs: int | None = Field(default=None, gt=0, description="most jobs in one micro-batch")
    batch_max_tokens: int | None = Field(default=None, gt=0, description="most prompt tokens in one micro-batch")
    max_attempts: int = Field(default=3, gt=0, description="a job under which the engine failed so often is given up")
    drain_s: float = Field(default=25, ge=0, description="seconds that a stopping worker gives to running jobs")
    health_host: str = Field(default="127.0.0.1", description="address of the worker's health endpoint")
    health_port: int = Field(default=8001, ge=0, le=65535, description="port of the worker's health endpoint")

    upstream_url: str = Field(
        default="", description="the OpenAI-compatible server of the engine `upstream`, with or without /v1"
    )
    upstream_api_key: SecretStr | None = Field(default=None, description="bearer token for that server")
    upstream_model: str = Field(
        default="", description="the name by which that server knows the model; the callers' name when empty"
    )
    upstream_slots: int = Field(default=32, gt=0, description="sequences that this worker may run there at once")
    upstream_kv_tokens: int = Field(
        default=131072, gt=0, description="tokens of that server's KV cache that this worker may fill"
    )

    simulated_slots: int = Field(default=32, gt=0, description="sequences that the simulated engine runs at once")
    simulated_kv_tokens: int = Field(default=131072, gt=0, description="KV cache of the simulated engine, in tokens")
    simulated_step_ms: float = Field(default=20, ge=0, description="time of one decode step of the simulated engine")
    simulated_prefill_tokens_per_s: float = Field(
        default=20000, gt=0, description="prefill speed of the simulated engine"
    )

    data_dir: Path = Field(default=Path(".headway"), description="folder of `headway up`: Valkey's data, sockets, logs")

    @field_validator("lane_shares", mode="before")
    @classmethod
    def _split_shares(cls, value: object) -> object:
        shares = tuple(value.split(",")) if isinstance(value, str) else value
        if isinstance(shares, tuple) and len(shares) != 3:
            raise ValueError("three numbers are needed, as in 0.5,0.3,0.2")
        return shares

    @field_validator("engine_args")
    @classmethod
    def _must_split(cls, value: str) -> str:
        shlex.split(value)
        return value

    @model_validator(mode="after")
    def _lanes_must_rise(self) -> Self:
        _ = self.lanes
        return self

    @property
    def lanes(self) -> tuple[Lane, ...]:
        return make_lanes(self.short_below, self.mid_to, self.lane_shares)

    @property
    def model_name(self) -> str:
        """The name that callers use: the served name, else the model's, else what the engine is."""
        return self.served_model or self.model or self.upstream_model or self.engine


def explain(error: ValidationError | ConfigurationError) -> str:
    """What is wrong with the settings, or with vLLM's, in one line."""
    if isinstance(error, ConfigurationError):
        return " ".join(error.message.split())
    ours = error.title == Settings.__name__
    return " ".join("; ".join(_problem(each, ours) for each in error.errors()).split())


def _problem(error: Any, ours: bool) -> str:
    if not (ours and error["loc"]):
        return str(error["msg"])
    return f"HEADWAY_{str(error['loc'][0]).upper()}={error['input']!r}: {error['msg']}"
