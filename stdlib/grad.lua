-- dt.value_and_grad: the value of a function of concrete tensors and the gradient of each parameter, by one traced
-- graph.
local core = require "dtrain.core"
local M = require "dtrain.nn.module"
local ops = require "dtrain.ops"
local parameter = require "dtrain.nn.parameter"
local scope = require "dtrain.nn.scope"
local trace = require "dtrain.trace"
local util = require "dtrain.util"

-- Replaces every concrete tensor in a nested table by a symbol of the graph; list collects the tensors in order.
local function symbolic(graph, x, name, list)
  if ops.is_concrete(x) then
    list[#list + 1] = x
    return graph:input(name, x:dtype(), x:shape())
  end
  if type(x) ~= "table" or getmetatable(x) ~= nil then return x end
  local out = {}
  for k, v in util.sorted(x) do out[k] = symbolic(graph, v, name .. "." .. tostring(k), list) end
  return out
end

--- dt.value_and_grad(function(model, batch) ... return loss end, model, batch...) -> loss (0-dim tensor), { name =
--- gradient }. The model is a module, or a table name -> tensor whose every tensor gets a gradient. Further arguments
--- are tensors, tables of tensors or plain values. Parameters that no gradient reaches are absent from the result.
--- Dropout drops, as in training.
return function(f, model, ...)
  util.check("value_and_grad", f, "callable")
  local graph = core.graph { plain_grad = true }
  local s = { graph = graph, symbols = {}, training = true, concrete = true,
    label = "the model given to value_and_grad" }
  local args = table.pack(...)
  local inputs, buffers, handed = {}, {}, model
  local entries
  local loss_of = function()
    if M.is(model) then
      M.base.each_parameter(model, function(_, p) p:concrete() end)
      trace.declare(graph, model, s.symbols, "")
      M.base.each_parameter(model, function(name, p)
        if p.type == "buffer" then buffers[#buffers + 1] = { name, p } end
      end)
    elseif type(model) == "table" then
      handed = {}
      for name, x in util.sorted(model) do
        if ops.is_concrete(x) then
          handed[name] = graph:param(tostring(name), x:shape(), { init = x, trainable = true })
        elseif parameter.is(x) then
          handed[name] = graph:param(tostring(name), x.shape, { init = x:concrete(), trainable = true })
        else
          handed[name] = x
        end
      end
    else
      util.fail("value_and_grad: the second argument is a model or a table of tensors, got %s (%s)", util.show(model),
        util.kind(model))
    end
    for i = 1, args.n do args[i] = symbolic(graph, args[i], "arg" .. i, inputs) end
    local loss = f(handed, table.unpack(args, 1, args.n))
    if not core.is_symbolic(loss) or loss:numel() ~= 1 then
      util.fail("value_and_grad: the function must return a scalar tensor, got %s", util.show(loss))
    end
    graph:output(loss, "loss")
    graph:loss(loss)
    graph:grad()
    entries = graph:grads()
    for _, entry in ipairs(entries) do graph:output(entry.symbol, entry.name) end
    return graph:compile { precision = "f32" }
  end
  local plan = scope.with(s, loss_of)
  local exec = core.exec(plan, { alone = true }) -- no peer takes part
  exec:ready()
  local results = exec:call(0, inputs)
  local grads = {}
  for i, entry in ipairs(entries) do grads[entry.name] = results[i + 1] end
  for _, b in ipairs(buffers) do b[2]:set(exec:get("buffer:" .. b[1]), b[1]) end
  exec:close()
  return results[1], grads
end
