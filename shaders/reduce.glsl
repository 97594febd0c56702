// reduce.glsl: sums in the order of the CPU backend, and the largest of one value per thread.
shared float reduced[THREADS];

// The sixteen-sum rule: thread i < 16 has the partial sum i.
float tree16_of_threads(float v) {
    barrier();
    reduced[thread] = v;
    barrier();
    if (thread < 8)
        reduced[thread] += reduced[thread + 8];
    barrier();
    precise float even = (reduced[0] + reduced[4]) + (reduced[2] + reduced[6]);
    precise float odd = (reduced[1] + reduced[5]) + (reduced[3] + reduced[7]);
    precise float sum = even + odd;
    return sum;
}

float max_of_threads(float v) {
    barrier();
    reduced[thread] = v;
    barrier();
    for (uint half_way = THREADS / 2; half_way > 0; half_way /= 2) {
        if (thread < half_way)
            reduced[thread] = max(reduced[thread], reduced[thread + half_way]);
        barrier();
    }
    return reduced[0];
}
