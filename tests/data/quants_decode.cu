// Decodes blocks of any format through shaders/quants.h.
#include "quants.h"

__global__ void decode(int type, const unsigned char *blocks, float *values, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        values[i] = q_value(type, blocks + i / q_block(type) * q_bytes(type), i % q_block(type));
}
