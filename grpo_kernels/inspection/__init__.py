"""What the compilers made of the Triton kernels, for every GPU of the launch tables and without one."""
