// The C++ core of megatron.packed. reference.py beside the packing room defines what each
// function means; tests hold the two equal.

#include "arrays.h"

PYBIND11_MODULE(_C, m) {
  m.doc() = "Integer routines of packing: boundary scan, gathers, partitions, packers.";
  packed::bind_boundaries(m);
  packed::bind_gather(m);
  packed::bind_materialise(m);
  packed::bind_partition(m);
  packed::bind_affinity(m);
  packed::bind_packers(m);
}
