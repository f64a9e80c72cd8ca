"""gradwire beside other libraries: gloo, MPICH and Open MPI."""
