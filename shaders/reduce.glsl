// reduce.glsl: the sum and the largest of one value per thread, for all threads, always in the same order.
shared float reduced[THREADS];

float sum_of_threads(float v) {
    barrier();
    reduced[thread] = v;
    barrier();
    for (uint half_way = THREADS / 2; half_way > 0; half_way /= 2) {
        if (thread < half_way)
            reduced[thread] += reduced[thread + half_way];
        barrier();
    }
    return reduced[0];
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
