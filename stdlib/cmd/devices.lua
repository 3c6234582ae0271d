-- dtrain devices: the processor and the GPUs that training can run on.
local core = require "dtrain.core"

return function()
  local gpus, missing = core.devices()
  print(("cpu: %d thread%s, %s kernels"):format(core.threads(), core.threads() == 1 and "" or "s", core.version().isa))
  print(gpus or "cuda: " .. missing)
  return 0
end
