#!/bin/sh
# nvcc compiles a kernel for this GPU, it runs, and gcc links with the driver's library.
set -e
PATH=$PATH:/usr/local/cuda/bin
cd "$(mktemp -d)"
cat > sum.cu <<'CODE'
#include <cstdio>
__global__ void add(const int *a, const int *b, int *c) { int i = blockIdx.x * blockDim.x + threadIdx.x; c[i] = a[i] + b[i]; }
int main() {
    const int n = 1 << 20;
    int *a, *b, *c, *host = new int[n];
    for (int i = 0; i < n; i++) host[i] = i;
    cudaMalloc(&a, n * 4); cudaMalloc(&b, n * 4); cudaMalloc(&c, n * 4);
    cudaMemcpy(a, host, n * 4, cudaMemcpyHostToDevice);
    cudaMemcpy(b, host, n * 4, cudaMemcpyHostToDevice);
    add<<<n / 256, 256>>>(a, b, c);
    if (cudaMemcpy(host, c, n * 4, cudaMemcpyDeviceToHost) != cudaSuccess) { puts("the kernel failed"); return 1; }
    for (int i = 0; i < n; i++) if (host[i] != 2 * i) { puts("wrong sums"); return 1; }
    puts("the kernel is right");
}
CODE
nvcc -arch=native sum.cu -o sum
./sum
echo 'int cuInit(unsigned); int main(void) { return cuInit(0); }' > link.c
gcc link.c -lcuda -o link
./link && echo "linked with the driver"
