-- dtrain [run] script.lua: runs the script; a job that it returns is trained. A job that nobody trained is an error: what did not
-- happen must not look like success.
local core = require "dtrain.core"
local engines = require "dtrain.engine"
local jobs = require "dtrain.job"
local load_script = require "dtrain.cmd.script"
local util = require "dtrain.util"

return function(words)
  local result, path = load_script(words)
  if result ~= nil and not jobs.is(result) then
    error(("%s: the script returned %s (%s); return dt.job { ... }, or nothing"):format(path, util.show(result),
      util.kind(result)), 0)
  end
  if result then require "dtrain.train"(result) end
  local idle = jobs.idle()
  if #idle > 0 and #idle == #jobs.made then
    util.fail_at(idle[1].where, "this job was never trained; return it from the script (return dt.job { ... }), or make an engine "
      .. "of it (dt.engine(job))")
  end
  for _, job in ipairs(core.rank() == 0 and idle or {}) do
    io.stderr:write(("note: %s: this job was never trained, others were\n"):format(job.where))
  end
  if engines.cut_short() then return core.interrupted() end
  return 0
end
