/* The empty MPI program: what mpirun and MPI_Init cost by themselves. */
#include <mpi.h>
int main(int argc, char **argv) {
  MPI_Init(&argc, &argv);
  return MPI_Finalize();
}
