-- dtrain [run] script.lua: runs the script; a job that it returns is trained.
local jobs = require "dtrain.job"
local load_script = require "dtrain.cmd.script"
local util = require "dtrain.util"

return function(words)
  local result, path = load_script(words)
  if result == nil then return 0 end -- a script with a loop of its own
  if not jobs.is(result) then
    error(("%s: the script returned %s (%s); return dt.job { ... }, or nothing"):format(path, util.show(result),
      util.kind(result)), 0)
  end
  require "dtrain.train"(result)
  return 0
end
