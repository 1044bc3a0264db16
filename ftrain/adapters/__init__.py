"""Low-rank adapters beside a frozen base."""

from ftrain.adapters.lora import lora as lora
