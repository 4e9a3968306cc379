// What the 256 threads of a block work out together. All of them call these.
#pragma once

#include "common.cuh"

namespace gradcomp::cuda {

// The sum of what the threads before this one bring; `total` becomes that of all.
template <class T>
inline T sum_before(T x, T& total) {
    __shared__ T warps[8];
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    T sum = x;
    for (int distance = 1; distance < 32; distance *= 2) {
        const T other = __shfl_up_sync(whole_warp, sum, distance);
        if (lane >= distance) sum = sum + other;
    }
    __syncthreads();  // of what an earlier call left there
    if (lane == 31) warps[warp] = sum;
    __syncthreads();
    T before = 0;
    total = 0;
    for (int i = 0; i < 8; ++i) {
        if (i < warp) before = before + warps[i];
        total = total + warps[i];
    }
    return before + sum - x;
}

// `op` does not depend on the order.
template <class T, class Op>
inline T reduce_block(T x, Op op) {
    __shared__ T warps[8];
    for (int distance = 16; distance > 0; distance /= 2) x = op(x, __shfl_xor_sync(whole_warp, x, distance));
    __syncthreads();  // of what an earlier call left there
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
    __syncthreads();
    x = warps[0];
    for (int i = 1; i < 8; ++i) x = op(x, warps[i]);
    return x;
}

}  // namespace gradcomp::cuda
