-- The smallest whole script: a linear map of 10 numbers to 5, learnt by SGD.   dtrain examples/linear.lua
local dt = require "dtrain"
local nn, optim, data = dt.nn, dt.optim, dt.data

local args = dt.args { lr = 0.01, epochs = 10 }

return dt.job {
  model     = nn.Linear(10, 5),
  loss      = nn.MSE(),
  data      = data.synthetic { inputs = { 10 }, targets = { 5 }, samples = 1000 },
  batch     = 32,
  optimizer = optim.SGD { lr = args.lr },
  epochs    = args.epochs,
}
