-- dtrain version
local core = require "dtrain.core"

return function()
  local v = core.version()
  print("dtrain " .. v.version)
  print("kernels: " .. v.isa)
  print("MPI: " .. (v.mpi and "Open MPI plug-in " .. v.mpi or "plug-in not found"))
  local gpus, missing = core.devices()
  print("CUDA: " .. (gpus and gpus:match("[^\n]*$") or missing))
  print(v.lua)
  return 0
end
