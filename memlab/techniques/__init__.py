"""The levers: one file each, to be read top to bottom in ten minutes.

| file | lever | saves | costs |
|---|---|---|---|
| `precision` | autocast, loss scaling, master weights, stochastic rounding | activations | digits |
| `accumulation` | micro-batches | activations in proportion | smaller matrix products |
| `checkpointing` | recompute instead of keep | activations, down to O(sqrt N) | up to one more forward |
| `attention` | tiles instead of a score matrix | O(T^2) becomes O(T) | scores computed twice |
| `sharding` | ZeRO, stages 1 to 3 | states by the number of ranks | bytes sent |
| `tensor_parallel` | one layer over several ranks | weights, their activations | bytes sent in each layer |
| `processes` | no lever: real ranks on this machine for the two above | | |
| `offload` | host memory, disk | what is moved away | bytes over a link |
| `freezing` | fewer trained layers | gradients, states, some activations | what isn't trained |
| `residual` | the identity path | nothing: it keeps gradients alive | one sum |

Each stands PyTorch's own mechanism beside a version written from scratch, and a closed form of its bytes.
They need only torch and `units`; every one runs on a CPU, on CUDA and inside `memlab.VirtualGPU`.
"""
