-- dtrain version
local core = require "dtrain.core"

return function()
  local v = core.version()
  print("dtrain " .. v.version)
  print("kernels: " .. v.isa)
  print("MPI: " .. (v.mpi and "Open MPI plug-in " .. v.mpi or "plug-in not found"))
  print("CUDA: " .. v.cuda)
  print(v.lua)
  return 0
end
