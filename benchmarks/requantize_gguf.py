"""Writes a GGUF file again with its matrices in another type, so that llama.cpp can be measured on the bits that we hold.

python benchmarks/requantize_gguf.py OUT.gguf [--type Q8_0] [FILE.gguf]        # default: the demo model
"""

import argparse
import pathlib

import gguf
import numpy as np
from maga_transformer.demo import demo_model


def rewrite(source: pathlib.Path, target: pathlib.Path, kind: gguf.GGMLQuantizationType) -> None:
    """Metadata and vectors stay as they are."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        array = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], array)
    for tensor in reader.tensors:
        if len(tensor.shape) == 1:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
            continue
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        writer.add_tensor(tensor.name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("source", nargs="?", type=pathlib.Path, help="default: the demo model")
    parser.add_argument("--type", default="Q8_0", choices=["Q8_0", "Q4_0", "Q4_1", "F16", "BF16"])
    args = parser.parse_args()
    rewrite(args.source or demo_model(), args.out, gguf.GGMLQuantizationType[args.type])


if __name__ == "__main__":
    main()
