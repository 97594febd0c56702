// control.h: what a test asks of the simulator, and what it sees of it.
#ifndef CUSIM_CONTROL_H
#define CUSIM_CONTROL_H

namespace cusim {

// The n-th call from now on fails; 0: none.
struct faults {
    int alloc;  // cudaMalloc: out of memory
    int launch; // a kernel: the device is lost, and stays it until this is -1
    int no_device;
};
extern faults fault;

// Since the program's start. allocations: those that were not freed.
struct counters {
    long launches, graph_launches, captures, syncs, allocations;
};
extern counters count;

// The order of lanes from now on: "fwd", "rev", or a number that seeds a shuffle.
void set_order(const char *);

} // namespace cusim

#endif
